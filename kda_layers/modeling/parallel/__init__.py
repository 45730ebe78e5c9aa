"""Models over several GPUs: sequences cut over ranks, heads shared by ranks."""
