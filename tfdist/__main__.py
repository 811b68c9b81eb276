"""`python -m tfdist` is `tfdist`, also if the command is not on the PATH."""

from tfdist.cli.main import app

if __name__ == "__main__":
    app(prog_name="tfdist")
