"""What people look at: terminal, report, figures, pages."""
