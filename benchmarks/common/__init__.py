"""What several programs of this folder share. A program finds it because it is started from its file."""
