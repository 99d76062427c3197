package main

// suite is what is measured together. Its figures are stored in a file of their own.
type suite struct {
	name, file string
	benchmarks []benchmark
}

// benchmark is a pattern of benchmarks of a package, and how long each runs: a duration or a number of iterations.
type benchmark struct{ dir, pattern, time string }

var suites = []suite{
	{"report", "test/bench/report/report.json", []benchmark{
		{"test/bench", "BenchmarkServerToRelay", "1x"},
		{"test/bench", "BenchmarkServer/OneCore$", "200000x"},
		{"test/bench", "BenchmarkServer/OneCoreOneSubscriber$", "200000x"},
		{"test/bench", "BenchmarkDelivery", "20x"},
		{"test/bench", "BenchmarkFloorFanout", "100000x"},
		{"test/bench", "BenchmarkLatency/^B2$/native", "20000x"},
		{"test/bench", "BenchmarkMatchPrefixes", "20000x"},
		{"test/bench", "BenchmarkMatchPrefixCost", "20000x"},
		{"test/bench", "BenchmarkMatchPrefix$", "5000x"},
		{"test/bench", "BenchmarkSnapshot/Quiet", "5x"},
		{"test/bench", "BenchmarkCatchUp", "5x"},
		{"test/bench", "BenchmarkHerd/clients=50$", "2x"},
		{"internal/core/index/radix", "BenchmarkMatch", "20x"},
		{"internal/core/index", "BenchmarkMatchBest", "100000x"},
		{"internal/core/index", "BenchmarkMatchGroups", "20000x"},
		{"pipeline", "BenchmarkTableMemory", "1x"},
		{"internal/core/index/radix", "BenchmarkConversations", "1x"},
	}},
	{"scale", "test/bench/report/scale.json", []benchmark{
		{"test/bench", "BenchmarkGrowth", "1x"},
		{"internal/core/index", "BenchmarkMatchGrowth", "2000x"},
	}},
}
