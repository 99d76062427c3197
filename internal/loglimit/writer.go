package loglimit

import (
	"bytes"
	"context"
	"io"
	"log/slog"
)

// Writer returns a writer of the lines of a library, which logs each as an attribute of a constant message, so that all are of one kind.
func Writer(to *slog.Logger, level slog.Level, message string) io.Writer {
	return writer{to, level, message}
}

type writer struct {
	log     *slog.Logger
	level   slog.Level
	message string
}

// Write implements io.Writer.
func (w writer) Write(line []byte) (int, error) {
	w.log.Log(context.Background(), w.level, w.message, "line", string(bytes.TrimSpace(line)))
	return len(line), nil
}
