"""What optimizers do to tables: hear of their steps, and know which rows each step moves."""
