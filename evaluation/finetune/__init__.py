"""Fine-tuning a BERT on MNLI, QQP, SQuAD and RACE, from the files they are published in (2019 paper, Table 5)."""
