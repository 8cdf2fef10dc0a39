"""What a check found wrong, as one file that runs again by itself, on any machine."""
