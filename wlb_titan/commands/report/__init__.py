"""What commands say of their results: rows for the console, and one HTML page each."""
