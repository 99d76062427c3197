package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/internal/recording"
	"github.com/kvcast/kvcast/internal/wire"
)

type decodeCmd struct {
	File string `arg:"" help:"File with a MessagePack payload, or - for standard input. A recording (.jsonl, .jsonl.gz) has a line per message: an array of frames in hexadecimal, or an object with this array under \"frames\"; the last frame of each message is decoded."`
}

func (*decodeCmd) Help() string {
	return cli.Examples("kvcast decode payload.bin", "kvcast decode recording.jsonl.gz", "cat payload.bin | kvcast decode -")
}

// Run prints an object for each payload. It fails at the end if a payload was rejected.
func (c *decodeCmd) Run(p cli.Process) error {
	d := decoder{out: bufio.NewWriter(p.Out)}
	if err := errors.Join(c.decode(p.In, &d), d.out.Flush()); err != nil {
		return err
	}
	if d.hasRejected {
		return cli.ErrSilent
	}
	return nil
}

// maxPayload is the number of bytes read at most. Payloads of engines are much smaller.
const maxPayload = 1 << 30

func (c *decodeCmd) decode(stdin io.Reader, d *decoder) error {
	if recording.IsName(c.File) {
		for frames, err := range recording.ReadFile(c.File) {
			if err != nil {
				return err
			}
			if err := d.decode(frames[len(frames)-1]); err != nil {
				return err
			}
		}
		return nil
	}
	in := stdin
	if c.File != "-" {
		f, err := os.Open(c.File)
		if err != nil {
			return err // contains the file name
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	payload, err := io.ReadAll(io.LimitReader(in, maxPayload))
	if err != nil {
		return fmt.Errorf("read payload: %w", err)
	}
	return d.decode(payload)
}

// decoder prints payloads.
type decoder struct {
	wire        wire.Decoder
	out         *bufio.Writer
	line        []byte
	hasRejected bool
}

func (d *decoder) decode(payload []byte) error {
	batch, err := d.wire.Decode(payload)
	if err != nil {
		var rejected wire.Error
		if !errors.As(err, &rejected) {
			return err
		}
		d.hasRejected = true
		_, err = fmt.Fprintf(d.out, "{\"error\": %q}\n", rejected.Name())
		return err
	}
	d.line = append(batch.AppendJSON(d.line[:0]), '\n')
	_, err = d.out.Write(d.line)
	return err
}
