"""State dicts that FX saved, read into models prepared here.

Read from the state (``given``), asked for by names that FX gives (``graph_names``, and the handlers of custom
modules), matched and carried out (``loading``). No model of FX is needed, nor its engine.
"""
