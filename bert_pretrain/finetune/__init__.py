"""Fine-tuning and prediction: from a file of rows to `metrics.json`.

run.py             lists the inputs (`LabelledInput`), runs the steps below, writes metrics, predictions and model card
rows.py, conll.py  read an input as `Example`s, from a table or from one word per line
classify.py, …     the `Task`: reads its fields from an example and encodes the examples as `Window`s of token ids
training.py        the `FineTuner`: trains, and keeps the best epoch
finetuned_bert.py  computes the outputs of a finished folder for windows, also for `predict`
classify.py, …     turns outputs into predictions, and predictions into metrics
"""
