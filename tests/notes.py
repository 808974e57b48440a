"""Where an exception of a replica says which replica it came from, on every version of Python."""

HAVE_NOTES = hasattr(BaseException, "add_note")  # since Python 3.11


def notes_of(error):
    """The notes of an exception; where Python has none, the texts of its causes in their order."""
    if HAVE_NOTES:
        # Also of classes that answer questions about attributes in their own way.
        return list(object.__getattribute__(error, "__dict__").get("__notes__", ()))
    texts = []
    while (error := error.__cause__) is not None:
        texts.append(str(error))
    return texts
