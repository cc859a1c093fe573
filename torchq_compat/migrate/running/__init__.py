"""Running a legacy script: redirected names, what it quantized, what to say at its end."""
