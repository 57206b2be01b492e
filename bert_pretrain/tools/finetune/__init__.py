"""`finetune`: a pretrained folder and a table to a classifier, a tagger or a finder of answers."""
