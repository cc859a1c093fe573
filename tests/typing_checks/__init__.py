"""The types as a user's type checker sees them."""
