"""bace serve"""

from contextlib import suppress
from pathlib import Path

from bace.errors import ConfigError


def command(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    batch: int = 32,
    max_body: int = 16,
    max_examples: int = 256,
    max_total: int = 256,
    watch: float = 2.0,
    threads: int | None = None,
    trust: bool = False,
    force: bool = False,
) -> None:
    """Serve predictions over HTTP, and on a page to drop files on.

    The page is at /, predictions are at /predict, the classes at /classes, the server's state at /health, and a
    description of all this at /docs. Requests that arrive together are predicted together. If the folder changes, its
    new model is opened and takes over; until then the old one answers. There is no password: everybody who reaches the
    port may ask.

    Args:
        model: the folder of a run, of a comparison (its best run is used), or of a saved Learner.
        host: the address to listen at; 0.0.0.0 for all of this machine.
        port: the port to listen at; 0 for a free one.
        batch: the number of examples that pass through the model together.
        max_body: megabytes in a request.
        max_examples: examples in a request.
        max_total: megabytes in all requests that are being answered; a request above this gets the answer to try again.
        watch: seconds between two checks of the folder; 0 means that it is opened once.
        threads: processor cores for the model; by default all that this process may use but one, which reads and
            answers requests.
        trust: allow a method of your own that MODEL names to be imported, which runs its code.
        force: serve even if run.json was changed after the run.
    """
    from bace.learner.opening import open_model

    try:
        from bace.serving.server import serve
    except ImportError as error:
        raise ConfigError("serving needs more packages: pip install 'bace-cil[serve]'") from error

    least = {"batch": 1, "max_body": 1, "max_examples": 1, "max_total": max_body, "threads": 1, "watch": 0}
    given = {"batch": batch, "max_body": max_body, "max_examples": max_examples, "max_total": max_total}
    for name, value in {**given, "threads": threads, "watch": watch}.items():
        if value is not None and value < least[name]:
            why = " (--max_body)" if name == "max_total" else ""
            raise ConfigError(f"--{name} is {value}: it must be at least {least[name]}{why}")
    with suppress(KeyboardInterrupt):  # Ctrl-C, once the server has closed
        serve(
            model,
            lambda: open_model(model, trust=trust, force=force),
            address=(host, port),
            batch=batch,
            max_body=max_body * 1024**2,
            max_examples=max_examples,
            max_total=max_total * 1024**2,
            watch=watch,
            threads=threads,
        )
