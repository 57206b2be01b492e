"""Entry point of `bert-pretrain`, `python -m bert_pretrain` and `torchrun -m bert_pretrain`."""

from bert_pretrain.cli import main

if __name__ == "__main__":
    main()
