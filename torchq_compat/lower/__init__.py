"""The last stage: a converted model for where it is deployed."""
