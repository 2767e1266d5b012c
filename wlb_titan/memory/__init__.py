"""Memory of a step at its peak: arithmetic on lengths and shapes."""
