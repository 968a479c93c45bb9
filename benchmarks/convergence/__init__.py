"""What each paper claims, tried on real data against tuned baselines. See docs/evidence.md, which is made from it."""
