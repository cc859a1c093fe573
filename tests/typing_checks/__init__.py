"""The types as a user's checker sees them."""
