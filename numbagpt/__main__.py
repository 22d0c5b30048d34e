"""`python -m numbagpt`: what was found on this machine, for a bug report."""

from numbagpt.gpu.runtime import report

if __name__ == "__main__":
    print(report())
