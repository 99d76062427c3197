package indexers

import (
	"runtime"
	"slices"
	"syscall"
	"time"
)

// Index is an index that Measure measures.
type Index interface {
	// Apply applies an event, which is valid until Apply returns.
	Apply(e *Event)
	// Match looks up a prompt.
	Match(p Prompt)
	// Matched returns the number of workers that the last Match found, and the sum of the lengths of their prefixes in
	// blocks.
	Matched() (workers, blocks int)
}

// Figures are what is measured of an index. Times are CPU time of the process, except for those of single prompts.
type Figures struct {
	Indexer  string `json:"indexer"`
	Checksum uint64 `json:"checksum,string"` // of the workload
	// FillNanos, ChurnNanos and SharedNanos are nanoseconds per block stored or removed; medians of the rounds.
	FillNanos   float64 `json:"fill_ns"`
	ChurnNanos  float64 `json:"churn_ns"`
	SharedNanos float64 `json:"shared_ns"`
	// FillBytes and ChurnBytes are the memory in use per block and worker after Fill and after Churn.
	FillBytes  float64 `json:"fill_bytes"`
	ChurnBytes float64 `json:"churn_bytes"`
	// LongMicros and ShortMicros are the median time of a match in microseconds.
	LongMicros  float64 `json:"long_us"`
	ShortMicros float64 `json:"short_us"`
	// MixRate is matches per second of CPU time.
	MixRate float64 `json:"mix_rate"`
	Answers Answers `json:"answers"`
}

// Answers are for each phase with prompts the sums of what Matched returned, which are the same for all indexes; of Mix,
// for the first prompts.
type Answers struct {
	Churn [2]int `json:"churn"`
	Long  [2]int `json:"long"`
	Short [2]int `json:"short"`
	Mix   [2]int `json:"mix"`
}

const (
	// sampleMatches is the number of matches per sample of a time, and samples the maximum number of samples.
	sampleMatches, samples = 8, 4_000
	// longest is the time after which no further sample is taken, and the least CPU time of Mix.
	longest = time.Second
	// mixAnswers is the number of prompts of Mix whose answers are compared.
	mixAnswers = 256
)

// Measure measures an index. open returns an empty index.
func Measure(w *Workload, rounds int, open func() Index) Figures {
	f := Figures{Checksum: w.Checksum}
	var fill, churn, shared []float64
	for round := range rounds {
		before := heap()
		x := open()
		fill = append(fill, apply(x, &w.Phases[Fill]))
		if round == 0 {
			f.FillBytes = float64(heap()-before) / float64(w.Phases[Fill].Blocks)
		}
		churn = append(churn, apply(x, &w.Phases[Churn]))
		if round == 0 {
			// Churn stores as many blocks as it removes.
			f.ChurnBytes = float64(heap()-before) / float64(w.Phases[Fill].Blocks)
			f.Answers.Churn = answers(x, w.Phases[Churn].AllPrompts())
		}
		runtime.KeepAlive(x)
	}
	f.LongMicros, f.Answers.Long = matchOne(open(), &w.Phases[Long])
	f.ShortMicros, f.Answers.Short = matchOne(open(), &w.Phases[Short])
	for round := range rounds {
		x := open()
		shared = append(shared, apply(x, &w.Phases[Shared]))
		if round == rounds-1 {
			apply(x, &w.Phases[Mix])
			prompts := w.Phases[Mix].AllPrompts()
			f.Answers.Mix = answers(x, prompts[:mixAnswers])
			f.MixRate = matchAll(x, prompts)
		}
	}
	f.FillNanos, f.ChurnNanos, f.SharedNanos = median(fill), median(churn), median(shared)
	return f
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// apply applies a phase, and returns the CPU time in nanoseconds per block.
func apply(x Index, p *Phase) float64 {
	runtime.GC()
	began := cpu()
	p.Events(x.Apply)
	return float64(cpu()-began) / float64(p.Blocks)
}

func answers(x Index, prompts []Prompt) (sum [2]int) {
	for _, p := range prompts {
		x.Match(p)
		workers, blocks := x.Matched()
		sum[0] += workers
		sum[1] += blocks
	}
	return sum
}

// matchOne returns the median time in microseconds of a match of the phase's only prompt.
func matchOne(x Index, phase *Phase) (micros float64, sum [2]int) {
	apply(x, phase)
	p := phase.AllPrompts()[0]
	var times []float64
	for end := time.Now().Add(longest); len(times) < samples && (len(times) == 0 || time.Now().Before(end)); {
		start := time.Now()
		for range sampleMatches {
			x.Match(p)
		}
		times = append(times, float64(time.Since(start))/sampleMatches/1e3)
	}
	return median(times), answers(x, []Prompt{p})
}

// matchAll matches the prompts in a mixed order, and returns the number of matches per second of CPU time.
func matchAll(x Index, prompts []Prompt) float64 {
	runtime.GC()
	some := make([]Prompt, 4096) // matched between two readings of the CPU time
	used, n := time.Duration(0), 0
	for used < longest {
		for i := range some {
			some[i] = prompts[mixed(uint64(n+i))%uint64(len(prompts))]
		}
		began := cpu()
		for _, p := range some {
			x.Match(p)
		}
		used += cpu() - began
		n += len(some)
	}
	return float64(n) / used.Seconds()
}

// heap returns the bytes in use.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// cpu returns the CPU time of this process, the garbage collector's included.
func cpu() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		panic("getrusage of this process: " + err.Error()) // cannot fail with these arguments
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
