"""The sizes that a captured model accepts, free, fixed or related, and the user's lines that constrain
them."""
