"""Fine-tuning of a BERT on MNLI, QQP, SQuAD and RACE."""
