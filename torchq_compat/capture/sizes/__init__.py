"""The sizes that a captured model accepts, free, fixed or related, and the lines that constrain them."""
