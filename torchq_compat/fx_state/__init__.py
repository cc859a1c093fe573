"""State dicts that FX saved, read into models prepared here.

Read from the state (``given``), asked for by names that FX gives (``pipeline/fx_graph_names.py``, and the
handlers of custom modules), matched and carried out (``pipeline/load_fx_state.py``). No model of FX is
needed, nor its engine.
"""
