"""From a model to an OpGraph."""
