"""State dicts that FX saved, read for models prepared by this package.

``given`` reads the state. ``fx_state/graph_names.py`` and the handlers of custom modules say what a model
wants, by the names that FX gives. ``fx_state/load.py`` matches and loads. Neither a model of FX nor
its engine is needed.
"""
