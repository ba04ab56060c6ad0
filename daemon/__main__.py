"""``python -m slotd.daemon daemon MODEL ...`` and ``python -m slotd.daemon inspect FILE``."""

from slotd.daemon.blas_threads import limit_blas_threads

limit_blas_threads()

from slotd.daemon.cli import main  # noqa: E402  (NumPy must load after the line above)

if __name__ == "__main__":
    main()
