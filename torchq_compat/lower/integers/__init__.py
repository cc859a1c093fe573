"""Lower a q-dq graph to one graph of plain integers, which every form of the model runs."""
