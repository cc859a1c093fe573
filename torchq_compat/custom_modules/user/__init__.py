"""Users' own custom modules: any float class with an observed and a quantized class."""
