"""The one error of loading a model: what is wrong with it, by name, before anything runs."""


class ModelLoadError(Exception):
    """The model cannot be loaded, or would be computed wrongly; the message says why."""
