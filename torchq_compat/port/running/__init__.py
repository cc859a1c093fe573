"""Run a legacy script: redirect the FX names, record what it quantizes, print a summary."""
