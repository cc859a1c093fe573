"""State dicts that FX saved, read for models prepared by this package.

``given`` reads the state. ``pipeline/fx_graph_names.py`` and the handlers of custom modules say what a model
wants, by the names that FX gives. ``pipeline/load_fx_state.py`` matches and loads. Neither a model of FX nor
its engine is needed.
"""
