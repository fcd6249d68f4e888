"""Result documents and tables: all of them functions of the journal."""
