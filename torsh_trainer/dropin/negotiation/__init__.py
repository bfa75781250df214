"""Who has asked for which collective: ranks agree on one order, by names, and then communicate."""
