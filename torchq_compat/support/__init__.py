"""What every stage uses: decisions, warnings at the user's line, files written whole, versions."""
