"""Results of the commands in words and figures: rows for the console, and one HTML page each."""
