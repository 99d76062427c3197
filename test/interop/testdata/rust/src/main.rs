//! A publisher in Rust, with the crate zeromq. The comment of package interop describes its input
//! and output.

use std::error::Error;

use tokio::io::{AsyncBufReadExt, BufReader, stdin};
use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

fn frame(size: usize) -> Vec<u8> {
    let mut frame = (0..=250).collect::<Vec<u8>>().repeat(size / 251 + 1);
    frame.truncate(size);
    frame
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let mut socket = PubSocket::new();
    let mut endpoint = args[3].clone();
    if args[2] == "bind" {
        endpoint = socket.bind(&endpoint).await?.to_string();
    } else {
        socket.connect(&endpoint).await?;
    }
    println!("{endpoint}");
    let mut lines = BufReader::new(stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let mut words = line.split(' ');
        let mut message = ZmqMessage::from(words.next().unwrap_or_default());
        for size in words {
            message.push_back(frame(size.parse()?).into());
        }
        socket.send(message).await?;
        println!("sent");
    }
    Ok(())
}
