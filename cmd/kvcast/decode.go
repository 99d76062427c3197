package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/recording"
)

type decodeCmd struct {
	File string `arg:"" help:"A MessagePack payload; - for one at standard input; or a recording, .jsonl or .jsonl.gz, with an array of frames in hexadecimal a line, by itself or as \"frames\" of an object: then the last frame of each."`
}

// Run prints an object for each payload. It fails, after all have been printed,
// when one of them was rejected.
func (c *decodeCmd) Run(std stdio) error {
	d := decodePrinter{out: bufio.NewWriter(std.out)}
	err := c.decode(std.in, &d)
	if err := errors.Join(err, d.out.Flush()); err != nil {
		return err
	}
	if d.rejected {
		return errSilent
	}
	return nil
}

// maxPayload is what is read of a payload: more than any engine publishes.
const maxPayload = 1 << 30

func (c *decodeCmd) decode(stdin io.Reader, d *decodePrinter) error {
	if recording.IsName(c.File) {
		for frames, err := range recording.ReadFile(c.File) {
			if err != nil {
				return err
			}
			if err := d.payload(frames[len(frames)-1]); err != nil {
				return err
			}
		}
		return nil
	}
	in := stdin
	if c.File != "-" {
		f, err := os.Open(c.File)
		if err != nil {
			return err // it says "open FILE: why"
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	payload, err := io.ReadAll(io.LimitReader(in, maxPayload))
	if err != nil {
		return fmt.Errorf("read payload: %w", err)
	}
	return d.payload(payload)
}

// decodePrinter prints what payloads say.
type decodePrinter struct {
	decoder  wire.Decoder
	out      *bufio.Writer
	line     []byte
	rejected bool
}

func (d *decodePrinter) payload(payload []byte) error {
	batch, err := d.decoder.Decode(payload)
	if err != nil {
		var name wire.Error
		if !errors.As(err, &name) {
			return err
		}
		d.rejected = true
		_, err = fmt.Fprintf(d.out, "{\"error\": %q}\n", name.Name())
		return err
	}
	d.line = append(batch.AppendJSON(d.line[:0]), '\n')
	_, err = d.out.Write(d.line)
	return err
}
