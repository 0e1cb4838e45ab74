"""`job=bench`, and the roofline that it compares with."""
