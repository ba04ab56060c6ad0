"""``python -m slotd.daemon daemon MODEL ...`` and ``python -m slotd.daemon inspect FILE``."""

from slotd.daemon.blas_threads import limit_blas_threads

limit_blas_threads()

import sys  # noqa: E402  (NumPy must load after the line above)

from slotd.daemon.engine_process import VERB  # noqa: E402

if __name__ == "__main__":
    if sys.argv[1:2] == [VERB]:  # the process that hosts the engine side; it needs no command line
        from slotd.daemon.child import main as run_engine

        run_engine(sys.argv[2])
    else:
        from slotd.daemon.cli import main

        main()
