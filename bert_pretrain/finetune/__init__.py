"""Fine-tuning and prediction: the way of a row from its file to `metrics.json`.

run.py             names the inputs (`LabelledInput`), and at the end writes metrics, predictions and the card
rows.py            an input becomes `Example`s
classify.py, …     the `Task`: what it reads from an example, and the `Window`s of ids that show it to the model
training.py        the `Learner`: transformers' Trainer for each trial; the best epoch is kept
finetuned_bert.py  the finished folder gives outputs for windows, as for `predict`
classify.py, …     outputs become predictions, and these the metrics
"""
