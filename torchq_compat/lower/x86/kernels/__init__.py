"""Which integer kernel computes what a q-dq pattern computes: one file per family, one table of all."""
