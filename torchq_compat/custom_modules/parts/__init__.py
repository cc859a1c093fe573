"""Custom modules that consist of parts: graphs whose ops are observed one by one, by name."""
