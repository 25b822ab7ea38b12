"""From a name to a model that trains on packed rows."""
