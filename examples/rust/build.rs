fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = "../../proto";
    println!("cargo:rerun-if-changed={root}");
    let files = protox::compile(["kvcast/v1/router_event_service.proto"], [root])?;
    tonic_build::configure()
        .build_server(false)
        .compile_fds(files)?;
    Ok(())
}
