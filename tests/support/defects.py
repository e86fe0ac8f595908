"""Faults of the code under test, which show that the checks of a simulation find them."""

from fsl_async.store.vectors import vectors


def defect(owner, name):
    """Make a function (original, *arguments) a defect: it takes `monkeypatch`, and replaces the
    function `name` of `owner`.
    """

    def decorate(function):
        def inject(monkeypatch):
            original = getattr(owner, name)
            monkeypatch.setattr(
                owner, name, lambda *given, **named: function(original, *given, **named)
            )

        inject.__name__ = getattr(function, "__name__", name)
        return inject

    return decorate


@defect(vectors, "decode_into")
def double_weights(original, frame, out):
    """Decode twice the values that were sent."""
    count = original(frame, out)
    out *= 2
    return count
