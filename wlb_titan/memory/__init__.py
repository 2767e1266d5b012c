"""What a step needs of a device's memory at its peak: arithmetic on lengths and shapes."""
