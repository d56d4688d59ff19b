"""The sections of a config: keys, types, bounds, defaults, one docstring per key. asyncrl.config puts them together."""
