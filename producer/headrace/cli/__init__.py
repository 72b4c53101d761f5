"""The ``headrace`` command (extra ``[cli]``)."""
