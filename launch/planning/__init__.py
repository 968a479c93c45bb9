"""``rankwise plan`` says what a run will hold, send and compute, from a model's shapes and a cluster's size."""
