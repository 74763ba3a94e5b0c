"""`python -m vlmrl`: the command line, as `torchrun -m vlmrl train ...` starts it on every rank."""

from vlmrl.cli.app import command

if __name__ == "__main__":
    command()
