"""`python -m bert_pretrain` is the same program as `bert-pretrain`; `torchrun -m` needs this form."""

from bert_pretrain.cli import main

if __name__ == "__main__":
    main()
